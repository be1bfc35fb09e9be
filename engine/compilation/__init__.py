"""The functions that run a model's forward pass: traces on a CPU, Inductor's code on a GPU."""
