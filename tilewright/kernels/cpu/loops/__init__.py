"""Loop nests of one fixed form, for kinds of region without a space of candidates."""
