"""What runs inside a worker: it runs a case, judges the results and sends the outcome back."""
