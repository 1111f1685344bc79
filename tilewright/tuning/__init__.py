"""Measuring candidates: trials, records, data sets, training, batches of models on Dask."""
