# The reference of a program: whole-prefix recomputation in float64, rounded to float32.
# Reads the checkpoint and a text. Writes trace.npz and trace.json.
rule trace:
    input:
        inputs("trace"),
    output:
        record("trace"),
    log:
        log_of("trace"),
    resources:
        **needs("trace"),
        runtime=60,
    params:
        key=key("trace"),
    shell:
        command("trace")
