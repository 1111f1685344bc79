"""Operator definitions by family; `tilewright.graph.table` unites them."""
