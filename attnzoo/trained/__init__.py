"""A trained model with its tokenizer, from a run or a model folder, and what is done with it."""
