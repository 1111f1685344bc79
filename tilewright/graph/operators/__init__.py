"""Operator definitions by family; `tilewright.graph.table` combines them."""
