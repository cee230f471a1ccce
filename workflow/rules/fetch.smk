# A model from its source, as one plain folder.
# Reads the model's source. Writes a checkpoint folder in safetensors and manifest.json.
rule fetch:
    input:
        inputs("fetch"),
    output:
        record("fetch"),
    log:
        log_of("fetch"),
    resources:
        **needs("fetch"),
        runtime=60,
    params:
        key=key("fetch"),
    shell:
        command("fetch")
