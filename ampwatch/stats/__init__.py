"""The statistics pass over gradients: the layout of its numbers (torch-free), its definition, and the choice."""
