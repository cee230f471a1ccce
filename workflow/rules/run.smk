# A row on a board.
# Reads the artifact, the graph's folder and the traces. Writes observations/{program}.npz and run.json.
rule run:
    input:
        inputs("run"),
    output:
        record("run"),
    log:
        log_of("run"),
    resources:
        **BOARDS,
        mem_mb=1500,
        runtime=120,
    params:
        key=key("run"),
    shell:
        command("run")
