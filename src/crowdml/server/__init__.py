"""The server: HTTP, authentication, and runners that fold the journal. No learning code lives here."""
