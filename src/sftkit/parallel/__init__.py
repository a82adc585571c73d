"""A model over several processes: FSDP2, tensor and context parallelism, pipeline stages, replicas."""
