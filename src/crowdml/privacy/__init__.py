"""Privacy: data enters as `Private` and leaves as `Release`. No model and no transport lives here."""
