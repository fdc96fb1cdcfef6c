"""A trained model with its tokenizer, from a run or a model folder: continuation, export, import, and commands."""
