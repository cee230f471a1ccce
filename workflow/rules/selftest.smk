# The self tests on a board: what must work before anything that it says counts.
# Reads the probes. Writes selftest.json.
rule selftest:
    input:
        inputs("selftest"),
    output:
        record("selftest"),
    log:
        log_of("selftest"),
    resources:
        **BOARDS,
        mem_mb=500,
        runtime=30,
    params:
        key=key("selftest"),
    shell:
        command("selftest")
