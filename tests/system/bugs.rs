//! Faults that other servers have had, tried on real models over HTTP; the cases are those of the tests of the API.

use std::net::SocketAddr;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::demo::{Setup, engine, pair, rstitch};
use crate::http::start;
use crate::structured::good;

/// One model, a hand-off now and then, and one at about every second token.
const ROUTES: [&str; 3] = ["small", "rstitch", "random"];
const COMPLETIONS: &str = "/v1/completions";

fn with_server(test: impl FnOnce(SocketAddr)) {
    let random = pair("random", "random", json!({"probabilities": {"large": 0.5}}));
    let engine = Arc::new(engine(&Setup::default(), &[rstitch("rstitch", 0.03), random]));
    let (address, stop, server) = start(&engine);
    test(address);
    drop(stop);
    server.join().expect("the server ends well");
}

fn body(route: &str, fields: &Value) -> Value {
    let mut body = json!({"model": route, "prompt": "<|im_start|>user\nWhat is 47 * 83?<|im_end|>\n<|im_start|>assistant\n",
        "max_tokens": 40, "temperature": 2, "ignore_eos": true, "return_token_ids": true});
    body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
    body
}

/// Token ids of all choices, which must come in order, each with an end.
fn choices(address: SocketAddr, route: &str, fields: &Value) -> Vec<Value> {
    let answer = good(address, COMPLETIONS, &body(route, fields));
    let choice = |(index, choice): (usize, &Value)| {
        assert_eq!(choice["index"], index);
        assert!(choice["finish_reason"].is_string(), "{choice}");
        choice["token_ids"].clone()
    };
    answer["choices"].as_array().expect("choices").iter().enumerate().map(choice).collect()
}

fn distinct(all: &[Value]) -> usize {
    all.iter().map(Value::to_string).collect::<std::collections::BTreeSet<_>>().len()
}

#[test]
fn bug_14_min_tokens_to_the_token() {
    with_server(|address| {
        for route in ROUTES {
            let ask = |fields: Value| {
                let mut all = json!({"temperature": 0, "seed": 1, "ignore_eos": false, "max_tokens": 300});
                all.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
                let answer = good(address, COMPLETIONS, &body(route, &all));
                let reason = answer["choices"][0]["finish_reason"].as_str().expect("a reason").to_owned();
                (answer["usage"]["completion_tokens"].as_u64().expect("a count"), reason)
            };
            let (tokens, reason) = ask(json!({}));
            assert_eq!(reason, "stop");
            // The end token is the first after as many.
            assert_eq!(ask(json!({"min_tokens": tokens - 1})).0, tokens);
            assert!(ask(json!({"min_tokens": tokens})).0 > tokens);
            assert_eq!(ask(json!({"min_tokens": tokens + 9, "max_tokens": tokens + 9})), (tokens + 9, "length".into()));
        }
    });
}

#[test]
fn bug_30_what_is_drawn_is_among_the_best() {
    with_server(|address| {
        for route in ROUTES {
            let ask = |fields: Value| {
                let answer = good(address, COMPLETIONS, &body(route, &fields));
                answer["choices"][0]["logprobs"].clone()
            };
            let named = json!({"logprobs": 3, "return_tokens_as_token_ids": true, "seed": 3});
            let of = |temperature: f64| {
                let mut fields = named.clone();
                fields["temperature"] = temperature.into();
                ask(fields)
            };
            let (greedy, hot) = (of(0.0), of(2.0));
            // The first token has the same before it.
            for id in greedy["top_logprobs"][0].as_object().expect("the best").keys() {
                assert_eq!(greedy["top_logprobs"][0][id], hot["top_logprobs"][0][id], "temperature changes nothing");
            }
            let (mut seldom, mut all) = (0, 0);
            for (logprobs, cold) in [(greedy, true), (hot, false)] {
                let tops = logprobs["top_logprobs"].as_array().expect("a list").iter();
                for (at, top) in tops.enumerate() {
                    let top = top.as_object().expect("the best");
                    let token = logprobs["tokens"][at].as_str().expect("a token");
                    assert_eq!(top[token], logprobs["token_logprobs"][at]);
                    let values: Vec<f64> = top.values().map(|value| value.as_f64().expect("a number")).collect();
                    assert!(values.iter().map(|value| value.exp()).sum::<f64>() < 1.001);
                    if cold {
                        assert_eq!((top.keys().next().map(String::as_str), top.len()), (Some(token), 3));
                    } else {
                        assert!(
                            top.len() == 3 || (top.len() == 4 && top.keys().next_back().is_some_and(|k| k == token))
                        );
                        seldom += usize::from(top.len() == 4);
                    }
                    all += 1;
                }
            }
            assert!(all == 80 && seldom > 0, "{seldom} of {all}");
        }
    });
}

#[test]
fn bug_36_a_seed_alone_and_among_others_without() {
    with_server(|address| {
        for route in ROUTES {
            let alone = choices(address, route, &json!({"seed": 5}));
            for _ in 0..3 {
                let among = std::thread::scope(|scope| {
                    for other in 0..7 {
                        // Of different lengths, so that places in the batch change hands.
                        scope.spawn(move || choices(address, route, &json!({"max_tokens": 10 + 5 * other})));
                    }
                    scope.spawn(|| choices(address, route, &json!({"seed": 5}))).join().expect("an answer")
                });
                assert_eq!(among, alone, "{route}");
            }
        }
    });
}

#[test]
fn bug_38_seeds_on_real_models() {
    with_server(|address| {
        for route in ROUTES {
            let unseeded: Vec<Value> = (0..3).flat_map(|_| choices(address, route, &json!({}))).collect();
            assert_eq!(distinct(&unseeded), 3, "{route}: no seed is no constant");
            let mut seen = Vec::new();
            for seed in [0, 1, -1, i64::MIN] {
                let [a, b] = [(); 2].map(|()| choices(address, route, &json!({"seed": seed})));
                assert_eq!(a, b, "{route} {seed}");
                seen.extend(a);
            }
            assert_eq!(distinct(&seen), 4, "{route}");
        }
    });
}

#[test]
fn bug_39_eight_choices_are_eight() {
    with_server(|address| {
        for route in ROUTES {
            for seed in [json!(null), json!(7)] {
                let all = choices(address, route, &json!({"n": 8, "seed": seed, "ignore_eos": false}));
                // Short answers may be the same by chance, but not all for the same reason.
                assert!(all.len() == 8 && distinct(&all) > 4, "{route}: {all:?}");
            }
            let [a, b] = [(); 2].map(|()| choices(address, route, &json!({"n": 8, "seed": 7})));
            assert_eq!(a, b, "{route}");
            assert_eq!(a[0], choices(address, route, &json!({"seed": 7}))[0], "{route}");
        }
    });
}
