# Is the graph the model? ONNX Runtime against the reference.
# Reads the graph and the traces. Writes observations/*.npz and check.json.
rule check:
    input:
        inputs("check"),
    output:
        record("check"),
    log:
        log_of("check"),
    resources:
        **needs("check"),
        runtime=60,
    params:
        key=key("check"),
    shell:
        command("check")
