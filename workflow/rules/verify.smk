# Observations compared with the reference: numbers, no judgement.
# Reads a row's observations and the traces. Writes metrics.json.
rule verify:
    input:
        inputs("verify"),
    output:
        record("verify"),
    log:
        log_of("verify"),
    resources:
        **needs("verify"),
        runtime=30,
    params:
        key=key("verify"),
    shell:
        command("verify")
