"""What runs inside a worker: a case is run, judged, and its outcome sent back."""
