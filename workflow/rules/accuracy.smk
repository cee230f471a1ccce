# The toolkit's accuracy analysis of a row's worst step: made for a diagnosis only, because it compiles once more.
# Reads what the build reads, and the row's metrics. Writes accuracy.json.
rule accuracy:
    input:
        inputs("accuracy"),
    output:
        record("accuracy"),
    log:
        log_of("accuracy"),
    resources:
        mem_mb=build_mb,
        runtime=120,
    params:
        key=key("accuracy"),
    shell:
        command("accuracy")
