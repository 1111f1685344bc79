"""Measuring candidates: trials, records, data sets, training, and batches of models on Dask."""
