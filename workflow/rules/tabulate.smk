# The table of the sweep, and the bundles.
# Reads all verdicts. Writes acceptance.tsv, acceptance.md and acceptance.json.
rule tabulate:
    input:
        inputs("tabulate"),
    output:
        record("tabulate"),
    log:
        log_of("tabulate"),
    resources:
        **needs("tabulate"),
        runtime=10,
    params:
        key=key("tabulate"),
    shell:
        command("tabulate")
