"""Operators and kernels: functions of tensors that know no model and no run."""
