"""The built-in experiments, a file each; `attnzoo.experiments.experiment.find` reads them."""
