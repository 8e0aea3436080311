//! The networks: their operations, read against the published classes, and the widths between them.

use serde_json::json;
use tokenrouter_plugin_api::net::{Net, Op};

use super::fixtures::{Router as File, multi_hidden, published};
use crate::net::Router;

const HIDDEN: u64 = 8;
const EMBEDDING: u64 = 6;

/// One line a node: its operation, its tensors and the nodes that it reads.
fn listing(net: &Net) -> Vec<String> {
    let prefix = |weight: &str, bias: &str| {
        let prefix = weight.strip_suffix(".weight").unwrap();
        assert_eq!(bias, format!("{prefix}.bias"));
        prefix.to_owned()
    };
    let line = |op: &Op| match op {
        Op::Hidden { back } => format!("hidden-{back}"),
        Op::TopLogits { count, back } => format!("top{count}-{back}"),
        Op::TokenEmbedding => "token".into(),
        Op::Embedding { weight } => format!("embedding {weight}"),
        Op::Row { tensor, row } => format!("row{row} {tensor}"),
        Op::Linear { weight, bias } => format!("linear {}", prefix(weight, bias.as_ref().unwrap())),
        Op::LayerNorm { weight, bias, eps } => {
            assert_eq!(*eps, 1e-5);
            format!("norm {}", prefix(weight, bias))
        }
        Op::TopK { count } => format!("topk{count}"),
        other => format!("{other:?}").to_lowercase(),
    };
    let reads = |inputs: &[u32]| inputs.iter().map(|input| format!(" {input}")).collect::<String>();
    net.nodes.iter().map(|node| line(&node.op) + &reads(&node.inputs)).collect()
}

/// The width of the net's value; panics where widths do not fit or a node has no reader.
fn width(net: &Net, file: &File) -> u64 {
    let info = file.info();
    let shape = |name: &str| info.shape(name).unwrap();
    let mut widths: Vec<u64> = Vec::new();
    for (at, node) in net.nodes.iter().enumerate() {
        let inputs: Vec<u64> = node.inputs.iter().map(|&input| widths[input as usize]).collect();
        widths.push(match &node.op {
            Op::Hidden { .. } => HIDDEN,
            Op::TopLogits { count, .. } => u64::from(*count),
            Op::TokenEmbedding => EMBEDDING,
            Op::Embedding { weight } | Op::Row { tensor: weight, .. } => shape(weight)[1],
            Op::Linear { weight, bias } => {
                assert_eq!(shape(weight)[1..], inputs, "{weight}");
                assert_eq!(shape(bias.as_ref().unwrap()), &shape(weight)[..1], "{weight}");
                shape(weight)[0]
            }
            Op::LayerNorm { weight, .. } => {
                assert_eq!(shape(weight), inputs, "{weight}");
                inputs[0]
            }
            Op::Concat => inputs.iter().sum(),
            Op::Add => {
                assert_eq!(inputs[0], inputs[1], "node {at}");
                inputs[0]
            }
            Op::TopK { count } => u64::from(*count),
            _ => inputs[0],
        });
        let last = at + 1 == net.nodes.len();
        assert!(last || net.nodes.iter().any(|node| node.inputs.contains(&(at as u32))), "node {at} has no reader");
    }
    *widths.last().unwrap()
}

fn router(file: &File) -> Router {
    Router::new("f.pt", &file.info()).unwrap()
}

/// The operations before the backbone's input projection; those behind are checked by their widths.
fn inputs(file: &File) -> Vec<String> {
    let net = router(file).net;
    assert_eq!(width(&net, file), 1);
    let all = listing(&net);
    let end = all.iter().position(|line| line.starts_with("linear backbone.input_projection")).unwrap();
    assert_eq!(all[end], format!("linear backbone.input_projection {}", end - 1));
    all[..end].to_vec()
}

pub fn with(model_type: &str, args: serde_json::Value, linears: &[(&str, u64, u64)], norms: &[(&str, u64)]) -> File {
    let mut args = args;
    args["hidden_dims"] = json!([16]);
    let mut file = File::new(model_type, args, 1);
    for &(prefix, outputs, inputs) in linears {
        file.linear(prefix, outputs, inputs);
    }
    for &(prefix, width) in norms {
        file.norm(prefix, width);
    }
    file
}

#[test]
fn the_published_class() {
    let file = published();
    let router = router(&file);
    assert_eq!(width(&router.net, &file), 1);
    assert_eq!(
        listing(&router.net),
        [
            "hidden-0",
            "token",
            "top10-0",
            "linear logits_projection 2",
            "concat 0 1 3",
            "linear combined_projection 4",
            "linear backbone.input_projection 5",
            "norm backbone.blocks.0.layer_norm 6",
            "linear backbone.blocks.0.mlp.0 7",
            "gelu 8",
            "linear backbone.blocks.0.mlp.3 9",
            "add 6 10",
            "norm backbone.blocks.1.layer_norm 11",
            "linear backbone.blocks.1.mlp.0 12",
            "gelu 13",
            "linear backbone.blocks.1.mlp.3 14",
            "add 11 15",
            "norm backbone.output_layer.0 16",
            "linear backbone.output_layer.1 17",
            "sigmoid 18",
        ]
    );
    assert_eq!((router.threshold, router.window, router.net.weights.as_str()), (Some(0.625), 1, "f.pt"));
}

#[test]
fn widths_change_by_projection_and_position_0_is_added() {
    let args = json!({"logits_size": 10, "hidden_dims": [16, 32, 12], "use_position_embedding": true});
    let mut file = File::new("LogitsClassifier", args, 3);
    file.linear("logits_projection", 16, 10).tensor("backbone.position_embedding", &[1024, 16]);
    let net = router(&file).net;
    assert_eq!(width(&net, &file), 3);
    let all = listing(&net);
    let (first, middle) = all.split_at(12);
    assert_eq!(
        first,
        [
            "top10-0",
            "linear logits_projection 0",
            "linear backbone.input_projection 1",
            "row0 backbone.position_embedding",
            "add 2 3",
            "norm backbone.blocks.0.layer_norm 4",
            "linear backbone.blocks.0.mlp.0 5",
            "gelu 6",
            "linear backbone.blocks.0.mlp.3 7",
            "linear backbone.blocks.0.dim_change 4",
            "add 9 8",
            "norm backbone.blocks.1.layer_norm 10",
        ]
    );
    assert!(middle.contains(&"linear backbone.blocks.1.dim_change 10".to_owned()), "{middle:?}");
    assert!(!middle.iter().any(|line| line.contains("blocks.2.dim_change")), "the last block keeps its width");
    assert_eq!(all.last().unwrap(), &format!("softmax {}", all.len() - 2));
}

#[test]
fn classes_of_one_input() {
    let logits = with("logitsclassifier", json!({}), &[("logits_projection", 16, 20)], &[]);
    assert_eq!(inputs(&logits), ["top20-0", "linear logits_projection 0"]);
    let logits = with("LogitsClassifier", json!({"normalize_input": true}), &[("logits_projection", 16, 20)], &[]);
    assert_eq!(inputs(&logits), ["top20-0", "softmax 0", "linear logits_projection 1"]);

    let linears = [("hidden_states_projection", 16, 8)];
    let hidden = with("HiddenStatesClassifier", json!({}), &linears, &[]);
    assert_eq!(inputs(&hidden), ["hidden-0", "linear hidden_states_projection 0"]);
    let hidden = with("HiddenStatesClassifier", json!({"normalize_input": true}), &linears, &[("layer_norm", 8)]);
    assert_eq!(inputs(&hidden), ["hidden-0", "norm layer_norm 0", "linear hidden_states_projection 1"]);
}

#[test]
fn the_class_with_a_head_of_its_own() {
    let class = "HiddenStatesClassifierWithLMHead";
    let all = with(class, json!({"topk": null}), &[("lm_head", 50, 8), ("post_lm_projection", 16, 50)], &[]);
    assert_eq!(inputs(&all), ["hidden-0", "linear lm_head 0", "linear post_lm_projection 1"]);
    let args = json!({"topk": 5, "normalize_input": true});
    let top = with(class, args, &[("lm_head", 50, 8), ("post_lm_projection", 16, 5)], &[("layer_norm", 8)]);
    let expected = ["hidden-0", "norm layer_norm 0", "linear lm_head 1", "topk5 2", "linear post_lm_projection 3"];
    assert_eq!(inputs(&top), expected);
}

#[test]
fn classes_of_several_inputs() {
    let token = with("HiddenStatesTokenLMHeadClassifier", json!({}), &[("combined_projection", 16, 14)], &[]);
    assert_eq!(inputs(&token), ["hidden-0", "token", "concat 0 1", "linear combined_projection 2"]);

    let linears = [("logits_projection", 8, 10), ("combined_projection", 16, 16)];
    let logits = with("HiddenStatesLogitsClassifier", json!({}), &linears, &[]);
    let expected = ["hidden-0", "top10-0", "linear logits_projection 1", "concat 0 2", "linear combined_projection 3"];
    assert_eq!(inputs(&logits), expected);
}

#[test]
fn normalised_inputs_of_the_published_class() {
    let mut file = published();
    file.meta["init_args"]["normalize_input"] = true.into();
    file.norm("layer_norm_hidden_states", 8).norm("layer_norm_token", 6);
    let expected = [
        "hidden-0",
        "norm layer_norm_hidden_states 0",
        "token",
        "norm layer_norm_token 2",
        "top10-0",
        "softmax 4",
        "linear logits_projection 5",
        "concat 1 3 6",
        "linear combined_projection 7",
    ];
    assert_eq!(inputs(&file), expected);
}

#[test]
fn an_embedding_in_the_file_goes_before_the_models() {
    let mut file = published();
    file.tensor("token_embeddings.weight", &[50, 6]);
    assert_eq!(inputs(&file)[1], "embedding token_embeddings.weight");
}

#[test]
fn a_window_is_read_oldest_first() {
    let expected = ["hidden-2", "hidden-1", "hidden-0", "concat 0 1 2", "linear hidden_states_projection 3"];
    assert_eq!(inputs(&multi_hidden()), expected);
    assert_eq!(router(&multi_hidden()).window, 3);

    let args = json!({"logits_size": 20, "neural_window_size": 2, "normalize_input": true});
    let logits = with("MultiLogitsClassifier", args, &[("logits_projection", 16, 20)], &[]);
    let expected = ["top10-1", "softmax 0", "top10-0", "softmax 2", "concat 1 3", "linear logits_projection 4"];
    assert_eq!(inputs(&logits), expected);

    let mut normed = multi_hidden();
    normed.meta["init_args"]["normalize_input"] = true.into();
    normed.norm("layer_norm", 8);
    assert_eq!(inputs(&normed)[..3], ["hidden-2", "norm layer_norm 0", "hidden-1"]);
}

#[test]
fn defaults_are_those_of_the_classes() {
    let mut file = File::new("HiddenStatesClassifier", json!({"hidden_dims": [256, 512, 256]}), 1);
    file.linear("hidden_states_projection", 256, 8);
    file.meta["init_args"] = json!({});
    assert_eq!(width(&router(&file).net, &file), 1);
}
