"""What runs a model's step: on a CPU a trace without Python, on a GPU what Inductor compiles."""
