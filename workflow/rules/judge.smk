# Metrics and thresholds to a verdict.
# Reads the metrics of a row's programs. Writes verdict.json.
rule judge:
    input:
        inputs("judge"),
    output:
        record("judge"),
    params:
        key=key("judge"),
    log:
        log_of("judge"),
    resources:
        mem_mb=300,
        runtime=10,
    shell:
        command("judge")
