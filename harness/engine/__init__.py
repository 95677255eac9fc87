"""The engine: Hypothesis in driver processes, cases in worker processes, the book in the main process."""
