# Observations compared with the reference: numbers, no judgement.
# Reads observations and a trace. Writes metrics.json.
rule verify:
    input:
        inputs("verify"),
    output:
        record("verify"),
    params:
        key=key("verify"),
    log:
        log_of("verify"),
    resources:
        mem_mb=1500,
        runtime=30,
    shell:
        command("verify")
