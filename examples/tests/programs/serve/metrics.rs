//! What Prometheus reads.

use std::collections::BTreeSet;

use serde_json::json;

use super::Server;

/// Names and kinds, which dashboards are built on, and numbers that add up.
#[test]
fn metrics_are_what_openmetrics_says() {
    let server = Server::start(&["--max-running", "2"]);
    for _ in 0..3 {
        server.complete(&json!({"prompt": "a", "max_tokens": 4, "temperature": 0}));
    }
    assert_eq!(server.post("/v1/completions", &json!({})).status, 400);
    let response = server.get("/metrics");
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert_eq!(response.header("content-type"), Some(kind));
    assert!(response.body.ends_with("\n# EOF\n"));
    let kinds = response
        .body
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "));
    let kinds: BTreeSet<&str> = kinds.collect();
    insta::assert_snapshot!(kinds.iter().copied().collect::<Vec<_>>().join("\n"), @r"
    replay_cached_tokens counter
    replay_connections gauge
    replay_connections_turned_away counter
    replay_generated_tokens counter
    replay_inter_token_seconds histogram
    replay_kv_pages gauge
    replay_kv_pages_used gauge
    replay_preemptions counter
    replay_prompt_tokens counter
    replay_requests_running gauge
    replay_requests_waiting gauge
    replay_responses counter
    replay_row_layers_run counter
    replay_row_layers_trimmed counter
    replay_steps counter
    replay_texts counter
    replay_time_to_first_token_seconds histogram
    ");
    let names: BTreeSet<&str> = kinds
        .iter()
        .filter_map(|kind| kind.split(' ').next())
        .collect();
    for line in response.body.lines().filter(|line| !line.starts_with('#')) {
        let (sample, value) = line.rsplit_once(' ').unwrap();
        let name = sample.split('{').next().unwrap();
        let family = ["_total", "_sum", "_count", "_bucket"]
            .iter()
            .find_map(|end| name.strip_suffix(end));
        assert!(names.contains(family.unwrap_or(name)), "{line}");
        assert!(value.parse::<f64>().unwrap() >= 0.0, "{line}");
    }
    for (name, value) in [
        ("replay_time_to_first_token_seconds_count", 3.0),
        ("replay_inter_token_seconds_count", 9.0),
        ("replay_generated_tokens_total", 12.0),
        ("replay_texts_total", 3.0),
        ("replay_requests_running", 0.0),
        ("replay_requests_waiting", 0.0),
        ("replay_connections", 1.0),
    ] {
        // Those of what goes on say so a little later.
        server.wait_for(name, value);
    }
    let completions = "replay_responses_total{path=\"/v1/completions\",status=";
    for of_status in ["\"200\"} 3", "\"400\"} 1"] {
        assert!(
            response
                .body
                .contains(&format!("{completions}{of_status}\n")),
            "{}",
            response.body
        );
    }
}
