# The matrices that the graphs of one form read, in one file.
# Reads the checkpoint. Writes weights.bin and weights.json.
rule prepare:
    input:
        inputs("prepare"),
    output:
        record("prepare"),
    log:
        log_of("prepare"),
    resources:
        **needs("prepare"),
        runtime=60,
    params:
        key=key("prepare"),
    shell:
        command("prepare")
