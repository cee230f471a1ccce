# The graph of a strategy, and its contract.
# Reads the prepared weights. Writes model.onnx, contract.json, host.npz and graph.json; of a decoder in pieces {piece}.onnx and .json too.
rule export:
    input:
        inputs("export"),
    output:
        record("export"),
    log:
        log_of("export"),
    resources:
        **needs("export"),
        runtime=60,
    params:
        key=key("export"),
    shell:
        command("export")
