"""The operator table, shape inference, the reference evaluator and the passes that simplify a graph."""
