"""The explanation of a program as one web page that loads nothing: its data, the drawing of its graph, and the files that the page is made of."""
