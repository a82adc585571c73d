"""How weights, activations and tokens lie over the processes: SimpleFSDP, tensor and expert parallelism as operators
of a graph."""
