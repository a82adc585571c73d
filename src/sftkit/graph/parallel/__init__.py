"""How weights, activations and tokens lie over the processes: sharding, tensor and expert parallelism as operators."""
