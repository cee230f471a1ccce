# Metrics and thresholds to a verdict.
# Reads the metrics of a row's programs. Writes verdict.json.
rule judge:
    input:
        inputs("judge"),
    output:
        record("judge"),
    log:
        log_of("judge"),
    resources:
        mem_mb=300,
        runtime=10,
    params:
        key=key("judge"),
    shell:
        command("judge")
