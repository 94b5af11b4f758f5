"""One file a cell: equations first, layer second."""
