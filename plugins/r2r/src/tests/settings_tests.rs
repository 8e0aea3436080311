use serde_json::{Value, json};

use crate::rules::{NeuralRule, Rule};
use crate::settings::{Method, SCHEMA, method};

fn read(settings: Value) -> Method {
    method(&settings.to_string()).unwrap()
}

fn error(settings: Value) -> String {
    method(&settings.to_string()).unwrap_err().message
}

#[test]
fn defaults_are_r2rs() {
    let plain = |strategy: &str| match read(json!({"strategy": strategy})) {
        Method::Plain(rule) => rule,
        other => panic!("{other:?}"),
    };
    let aleatoric = 2.275;
    let only = |aleatoric, epistemic, entropy| Rule::Measures { aleatoric, epistemic, entropy };
    assert_eq!(plain("immediate"), only(Some(aleatoric), None, None));
    assert_eq!(plain("entropy"), only(None, None, Some(0.45)));
    assert_eq!(plain("momentum"), Rule::Momentum { aleatoric, factor: 0.7, quick_to_ref: 0.3, ref_to_quick: 0.7 });
    assert_eq!(plain("rolling"), Rule::Rolling { aleatoric, entropy: 0.02, window: 3 });
    assert_eq!(plain("duo_rolling"), Rule::DuoRolling { aleatoric, window: 3 });
    assert_eq!(plain("random"), Rule::Random { reference_prob: 0.5 });
    let neural = |rule| Method::Neural { rule, router: "r.pt".into(), threshold: None };
    assert_eq!(read(json!({"router": "r.pt"})), neural(NeuralRule::Each));
    let rolling = json!({"strategy": "neural_rolling", "router": "r.pt"});
    assert_eq!(read(rolling), neural(NeuralRule::Rolling { window: 3 }));
    let windowed = json!({"strategy": "neural_multi_input", "router": "r.pt"});
    assert_eq!(read(windowed), neural(NeuralRule::Window));
}

#[test]
fn the_schema_has_the_same_defaults() {
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    let default = |name: &str| schema["properties"][name]["default"].clone();
    assert_eq!(default("strategy"), "neural");
    for (strategy, names) in [
        ("momentum", &["aleatoric_threshold", "momentum_factor", "quick_to_ref", "ref_to_quick"][..]),
        ("duo_rolling", &["aleatoric_threshold", "window_size"]),
        ("random", &["reference_prob"]),
    ] {
        let mut settings = json!({"strategy": strategy});
        let bare = read(settings.clone());
        for &name in names {
            settings[name] = default(name);
        }
        assert_eq!(read(settings), bare);
    }
}

#[test]
fn immediate_tests_what_is_given() {
    let settings = json!({"strategy": "immediate", "epistemic_threshold": 0.1, "entropy_threshold": 2});
    let rule = Rule::Measures { aleatoric: None, epistemic: Some(0.1), entropy: Some(2.0) };
    assert_eq!(read(settings), Method::Plain(rule));
}

#[test]
fn settings_reach_their_rules() {
    let settings = json!({
        "strategy": "momentum", "aleatoric_threshold": 2, "momentum_factor": 0.5, "quick_to_ref": 0.1, "ref_to_quick": 0.9
    });
    let rule = Rule::Momentum { aleatoric: 2.0, factor: 0.5, quick_to_ref: 0.1, ref_to_quick: 0.9 };
    assert_eq!(read(settings), Method::Plain(rule));
    let settings = json!({"strategy": "rolling", "aleatoric_threshold": 1, "entropy_threshold": 0.1, "window_size": 5});
    assert_eq!(read(settings), Method::Plain(Rule::Rolling { aleatoric: 1.0, entropy: 0.1, window: 5 }));
    let settings = json!({"strategy": "neural_rolling", "router": "r", "threshold": 0.25, "window_size": 1});
    let (rule, router) = (NeuralRule::Rolling { window: 1 }, "r".into());
    assert_eq!(read(settings), Method::Neural { rule, router, threshold: Some(0.25) });
}

/// Which settings each strategy takes; all others are refused.
#[test]
fn a_setting_of_another_strategy_is_named() {
    let takes = [
        ("neural", "router, threshold"),
        ("immediate", "aleatoric_threshold, epistemic_threshold, entropy_threshold"),
        ("entropy", "entropy_threshold"),
        ("momentum", "aleatoric_threshold, momentum_factor, quick_to_ref, ref_to_quick"),
        ("rolling", "aleatoric_threshold, entropy_threshold, window_size"),
        ("duo_rolling", "aleatoric_threshold, window_size"),
        ("neural_rolling", "router, threshold, window_size"),
        ("neural_multi_input", "router, threshold"),
        ("random", "reference_prob"),
    ];
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    let all: Vec<&String> = schema["properties"].as_object().unwrap().keys().filter(|key| *key != "strategy").collect();
    assert_eq!(all.len(), 10);
    for (strategy, list) in takes {
        let taken: Vec<&str> = list.split(", ").collect();
        for &name in &all {
            let mut settings = json!({"strategy": strategy});
            if taken.contains(&"router") {
                settings["router"] = "r.pt".into();
            }
            settings[name] = match name.as_str() {
                "router" => "r.pt".into(),
                "window_size" => 2.into(),
                _ => 0.5.into(),
            };
            if taken.contains(&name.as_str()) {
                read(settings);
            } else {
                let expected =
                    format!("{name} is given, but the strategy `{strategy}` does not use it; it takes {list}");
                assert_eq!(error(settings), expected);
            }
        }
    }
    assert_eq!(schema["properties"]["strategy"]["enum"], json!(takes.map(|(strategy, _)| strategy)));
}

#[test]
fn a_router_is_required_where_it_is_read() {
    for strategy in ["neural", "neural_rolling", "neural_multi_input"] {
        let message = format!("router is missing; the strategy `{strategy}` needs the path");
        assert!(error(json!({"strategy": strategy})).starts_with(&message));
        assert!(error(json!({"strategy": strategy, "router": ""})).starts_with(&message));
    }
    assert!(error(json!({})).starts_with("router is missing; the strategy `neural`"));
}

#[test]
fn numbers_have_their_ranges() {
    let refused = |strategy: &str, name: &str, value: f64, range: &str| {
        let mut settings = json!({"strategy": strategy});
        settings[name] = value.into();
        assert_eq!(error(settings), format!("{name} is {value}; set it to {range}"));
    };
    for value in [-0.1, 1.1] {
        refused("neural", "threshold", value, "0 to 1");
        refused("immediate", "epistemic_threshold", value, "0 to 1");
        refused("momentum", "quick_to_ref", value, "0 to 1");
        refused("momentum", "ref_to_quick", value, "0 to 1");
        refused("random", "reference_prob", value, "0 to 1");
    }
    refused("momentum", "momentum_factor", 1.0, "0 or more and below 1");
    refused("rolling", "aleatoric_threshold", -1.0, "0 or more");
    refused("entropy", "entropy_threshold", -0.5, "0 or more");
    for size in [0, 1025] {
        let message = format!("window_size is {size}; set it to 1 to 1024");
        assert_eq!(error(json!({"strategy": "duo_rolling", "window_size": size})), message);
    }
}

#[test]
fn unknown_names_and_types_are_refused() {
    assert!(error(json!({"treshold": 1})).contains("unknown field `treshold`"));
    assert!(error(json!({"strategy": "neurall"})).contains("unknown variant `neurall`"));
    assert!(error(json!({"strategy": "entropy", "entropy_threshold": "1"})).contains("invalid type"));
    assert!(error(json!({"strategy": "rolling", "window_size": 2.5})).contains("invalid type"));
}
