"""The mathematics behind `core_algos`: pure functions of tensors, one file for each kind."""
