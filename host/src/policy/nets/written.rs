//! Router networks that a configuration describes, for policies that cannot: modules in WebAssembly.

use serde::Deserialize;
use serde_json::Value;
use tokenrouter_plugin_api::net::{Net, NodeIndex, Op};

/// A net, and which model of the route computes it.
#[derive(Clone, Debug, PartialEq)]
pub struct HostNet {
    /// Role or name of the model; the route's entry where it is not given.
    pub at: Option<String>,
    pub net: Net,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    file: String,
    at: Option<String>,
    nodes: Vec<WrittenNode>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenNode {
    op: String,
    /// The nodes that it reads, counted from 0; the one before it where they are not given.
    of: Option<Vec<NodeIndex>>,
    prefix: Option<String>,
    tensor: Option<String>,
    bias: Option<bool>,
    eps: Option<f32>,
    row: Option<u32>,
    count: Option<u32>,
    back: Option<u32>,
}

impl HostNet {
    /// One that is never computed, for checks and replays that have scores without it.
    pub fn made_up(name: &str) -> Self {
        let mut net = Net::new(name, "");
        net.hidden();
        Self { at: None, net }
    }
}

const OPS: &str = "hidden, top_logits, token_embedding, embedding, row, linear, batch_norm, layer_norm, rms_norm, \
                   concat, add, softmax, gelu, silu, relu, tanh, sigmoid and top_k";

/// The nets of a table `nets`, by name. The error begins with the place within the table.
pub fn written(table: &Value) -> Result<Vec<HostNet>, String> {
    let table = table.as_object().ok_or_else(|| ": is no table; write [routes.ROUTE.nets.NAME]".to_owned())?;
    table.iter().map(|(name, value)| one(name, value).map_err(|e| format!(".{name}{e}"))).collect()
}

fn one(name: &str, value: &Value) -> Result<HostNet, String> {
    let Written { file, at, nodes } =
        serde_path_to_error::deserialize(value).map_err(|e| match e.path().to_string().as_str() {
            "." => format!(": {}", e.inner()),
            path => format!(".{path}: {}", e.inner()),
        })?;
    let mut net = Net::new(name, file);
    for (at, mut node) in nodes.into_iter().enumerate() {
        let place = |e: String| format!(".nodes[{at}]: {e}");
        let op = node.op().map_err(place)?;
        let source = matches!(
            op,
            Op::Hidden { .. } | Op::TopLogits { .. } | Op::TokenEmbedding | Op::Embedding { .. } | Op::Row { .. }
        );
        let inputs = match node.of.take() {
            Some(inputs) => inputs,
            None if source => Vec::new(),
            None => {
                vec![(at as NodeIndex).checked_sub(1).ok_or_else(|| place("has no node before it to read".into()))?]
            }
        };
        if let Some(field) = node.left() {
            return Err(place(format!("{} takes no `{field}`; leave it out", node.op)));
        }
        net.push(op, &inputs);
    }
    Ok(HostNet { at, net })
}

impl WrittenNode {
    /// The operation; what it takes is taken out.
    fn op(&mut self) -> Result<Op, String> {
        fn need<T>(op: &str, field: &str, value: Option<T>) -> Result<T, String> {
            value.ok_or_else(|| format!("{op} needs `{field}`"))
        }
        let Self { op, prefix, tensor, bias, eps, row, count, back, .. } = self;
        let weight = |prefix: &str| format!("{prefix}.weight");
        Ok(match op.as_str() {
            "hidden" => Op::Hidden { back: back.take().unwrap_or(0) },
            "top_logits" => Op::TopLogits { count: need(op, "count", count.take())?, back: back.take().unwrap_or(0) },
            "token_embedding" => Op::TokenEmbedding,
            "embedding" => Op::Embedding { weight: need(op, "tensor", tensor.take())? },
            "row" => Op::Row { tensor: need(op, "tensor", tensor.take())?, row: need(op, "row", row.take())? },
            "linear" => {
                let prefix = need(op, "prefix", prefix.take())?;
                let bias = bias.take().unwrap_or(true).then(|| format!("{prefix}.bias"));
                Op::Linear { weight: weight(&prefix), bias }
            }
            "batch_norm" => {
                Op::BatchNorm { prefix: need(op, "prefix", prefix.take())?, eps: eps.take().unwrap_or(1e-5) }
            }
            "layer_norm" => {
                let prefix = need(op, "prefix", prefix.take())?;
                Op::LayerNorm {
                    weight: weight(&prefix),
                    bias: format!("{prefix}.bias"),
                    eps: eps.take().unwrap_or(1e-5),
                }
            }
            "rms_norm" => {
                Op::RmsNorm { weight: weight(&need(op, "prefix", prefix.take())?), eps: need(op, "eps", eps.take())? }
            }
            "concat" => Op::Concat,
            "add" => Op::Add,
            "softmax" => Op::Softmax,
            "gelu" => Op::Gelu,
            "silu" => Op::Silu,
            "relu" => Op::Relu,
            "tanh" => Op::Tanh,
            "sigmoid" => Op::Sigmoid,
            "top_k" => Op::TopK { count: need(op, "count", count.take())? },
            other => return Err(format!("op = {other:?}: the operations are {OPS}")),
        })
    }

    /// A field that the operation has no use for.
    fn left(&self) -> Option<&'static str> {
        let Self { prefix, tensor, bias, eps, row, count, back, .. } = self;
        let left = [
            ("prefix", prefix.is_some()),
            ("tensor", tensor.is_some()),
            ("bias", bias.is_some()),
            ("eps", eps.is_some()),
            ("row", row.is_some()),
            ("count", count.is_some()),
            ("back", back.is_some()),
        ];
        left.into_iter().find(|(_, there)| *there).map(|(field, _)| field)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_table_is_what_a_policy_would_describe() {
        let table = json!({ "confidence": { "file": "w.pt", "at": "slm", "nodes": [
            { "op": "hidden" },
            { "op": "linear", "prefix": "mlp.0" },
            { "op": "batch_norm", "prefix": "mlp.1" },
            { "op": "relu" },
            { "op": "add", "of": [3, 0] },
            { "op": "linear", "prefix": "out", "bias": false },
        ] } });
        let mut net = Net::new("confidence", "w.pt");
        let hidden = net.hidden();
        let x = net.linear(hidden, "mlp.0");
        let x = net.batch_norm(x, "mlp.1");
        let x = net.relu(x);
        let x = net.add(&[x, hidden]);
        net.push(Op::Linear { weight: "out.weight".into(), bias: None }, &[x]);
        assert_eq!(written(&table), Ok(vec![HostNet { at: Some("slm".into()), net }]));
        assert_eq!(written(&json!({})), Ok(vec![]));
    }

    #[test]
    fn refusals_name_the_place() {
        let error = |value: Value| written(&json!({ "n": value })).unwrap_err();
        let nodes = |nodes: Value| error(json!({ "file": "w.pt", "nodes": nodes }));
        assert_eq!(error(json!({ "file": "w.pt" })), ".n: missing field `nodes`");
        assert!(error(json!({ "fil": 1 })).starts_with(".n.fil: unknown field `fil`"));
        assert!(nodes(json!([{ "op": "hidden", "of": -1 }])).starts_with(".n.nodes[0].of: invalid"));
        assert_eq!(nodes(json!([{ "op": "relu" }])), ".n.nodes[0]: has no node before it to read");
        assert_eq!(nodes(json!([{ "op": "linear" }])), ".n.nodes[0]: linear needs `prefix`");
        assert_eq!(nodes(json!([{ "op": "hidden", "eps": 1 }])), ".n.nodes[0]: hidden takes no `eps`; leave it out");
        assert!(
            nodes(json!([{ "op": "conv" }])).starts_with(".n.nodes[0]: op = \"conv\": the operations are hidden, ")
        );
    }
}
