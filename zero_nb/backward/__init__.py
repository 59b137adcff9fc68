"""The step inside backward: with DDP (`overlap`) and without it (`data_parallel`)."""
