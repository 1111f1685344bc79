"""Learned models: forests that correct the estimates."""
