"""The sharded step: flat buckets, pieces of parameters, rules of classes, and the optimizer."""
