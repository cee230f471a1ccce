"""One module a stage, each with `run(job)`: it reads files, writes files, and returns the body of its record."""
