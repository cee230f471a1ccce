# A model from its source, as one plain folder.
# Reads the model's source. Writes a checkpoint folder in safetensors and manifest.json.
rule fetch:
    input:
        inputs("fetch"),
    output:
        record("fetch"),
    params:
        key=key("fetch"),
    log:
        log_of("fetch"),
    resources:
        mem_mb=2500,
        runtime=60,
    shell:
        command("fetch")
