"""Problems: case files, the tensors that follow from them, and strategies that draw them. Needs no kernel."""
