use super::*;

#[cfg(feature = "otel")]
#[test]
fn where_spans_go() {
    let traces = |text: &str| parse(&format!("{BASE}[traces]\n{text}")).unwrap().traces.unwrap();
    let plain = traces("endpoint = \"http://127.0.0.1:4318\"");
    assert_eq!(plain.endpoint.to_string(), "http://127.0.0.1:4318/v1/traces");
    assert_eq!((plain.sample, plain.service_name.as_str()), (1.0, "tokenrouter"));
    let full = traces("endpoint = \"http://c/\"\nsample = 0.25\nservice_name = \"router a\"");
    assert_eq!((full.sample, full.service_name.as_str()), (0.25, "router a"));
    assert_eq!(parse(BASE).unwrap().traces, None);
    let variable = parse_with(BASE, &[("TOKENROUTER__TRACES__ENDPOINT", "http://c:1")]).unwrap();
    assert_eq!(variable.traces.unwrap().endpoint.port, 1);
}

#[cfg(feature = "otel")]
#[test]
fn what_is_no_place_for_spans() {
    let endpoint = "endpoint = \"http://c:4318\"\n";
    for (text, message) in [
        (
            "sample = 1",
            "6: [traces]: has no `endpoint`; add `endpoint = \"http://127.0.0.1:4318\"`, or leave [traces] out",
        ),
        (
            "endpoint = \"https://c\"",
            "7: traces.endpoint = \"https://c\": spans are sent without TLS; give the http:// URL of a collector that \
             is near",
        ),
        ("endpoint = 4318", "7: traces.endpoint = 4318: must be a string, not an integer"),
        (&format!("{endpoint}sample = 1.5"), "8: traces.sample = 1.5: must be from 0 to 1"),
        (&format!("{endpoint}service_name = \"\""), "8: traces.service_name = \"\": must not be empty"),
        (
            &format!("{endpoint}service_name = \"a\\nb\""),
            "8: traces.service_name = \"a\\nb\": must be 1 to 128 characters without control characters",
        ),
        (&format!("{endpoint}sampel = 1"), "8: unknown key `traces.sampel`: did you mean `sample`?"),
    ] {
        assert_eq!(more(&format!("[traces]\n{text}")), format!("dir/t.toml:{message}"));
    }
}

#[cfg(feature = "otel")]
#[test]
fn traces_need_a_restart() {
    let with = |more: &str| parse(&format!("{BASE}{more}")).unwrap();
    let table = "[traces]\nendpoint = \"http://c:1\"\n";
    for (new, said) in [
        ("", " traces.endpoint = none: the server runs with \"http://c:1/v1/traces\""),
        (
            "[traces]\nendpoint = \"http://d:1\"\n",
            "7: traces.endpoint = \"http://d:1/v1/traces\": the server runs with \"http://c:1/v1/traces\"",
        ),
        (&format!("{table}sample = 0.5"), "8: traces.sample = 0.5: the server runs with 1.0"),
        (
            &format!("{table}service_name = \"x\""),
            "8: traces.service_name = \"x\": the server runs with \"tokenrouter\"",
        ),
    ] {
        let refused = with(new).taken_over(&with(table)).unwrap_err().to_string();
        assert_eq!(refused, format!("dir/t.toml:{said}; restart to change it"));
    }
}

#[cfg(not(feature = "otel"))]
#[test]
fn a_build_without_traces_says_so() {
    let refused = more("[traces]\nendpoint = \"http://c:1\"");
    assert!(refused.starts_with("dir/t.toml:6: [traces]: this program was built without traces"), "{refused}");
    assert!(refused.contains("the feature `otel`"), "{refused}");
}
