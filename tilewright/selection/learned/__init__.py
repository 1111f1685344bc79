"""Learned parts: forests that correct estimates."""
