"""Numbers to a verdict: comparison with the reference, gates, symptoms, causes. numpy only."""
