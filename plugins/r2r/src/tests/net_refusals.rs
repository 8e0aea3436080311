//! Files that are no router, or not the one that they say.

use serde_json::json;

use super::fixtures::{Router as File, multi_hidden, published};
use super::net_tests::with;
use crate::net::Router;

fn error(file: &File) -> String {
    let error = Router::new("f.pt", &file.info()).unwrap_err().message;
    error.strip_prefix("router `f.pt`: ").unwrap().to_owned()
}

#[test]
fn refuses_windows_that_do_not_fit() {
    let mut file = with("MultiLogitsClassifier", json!({}), &[("logits_projection", 16, 20)], &[]);
    assert!(error(&file).contains("reads 20 values, which is no whole number of logits for each of 3 positions"));
    let mut normed = multi_hidden();
    normed.meta["init_args"]["normalize_input"] = true.into();
    normed.norm("layer_norm", 24);
    assert!(error(&normed).starts_with("layer_norm.weight has shape [24], but each of 3 positions"));
    for size in [0, 65] {
        file.meta["init_args"]["neural_window_size"] = size.into();
        assert_eq!(error(&file), format!("init_args.neural_window_size is {size}; it must be 1 to 64"));
    }
}

#[test]
fn refuses_other_classes() {
    let mut file = published();
    file.meta["model_type"] = "MultiClassLogitsClassifier".into();
    assert_eq!(
        error(&file),
        "model_type `MultiClassLogitsClassifier` is not supported; supported are LogitsClassifier, HiddenStatesClassifier, \
         HiddenStatesClassifierWithLMHead, HiddenStatesTokenLMHeadClassifier, HiddenStatesTokenLMHeadLogitsClassifier, \
         HiddenStatesLogitsClassifier, MultiLogitsClassifier, MultiHiddenStatesClassifier"
    );
}

#[test]
fn refuses_missing_metadata() {
    for meta in [json!({}), json!({"init_args": {}}), json!({"model_type": 3})] {
        let error = error(&File { meta, ..published() });
        assert!(error.starts_with("the file, or the .json file beside it, cannot be used ("), "{error}");
        assert!(error.contains("a router needs model_type, init_args and common_args"), "{error}");
        assert!(error.contains(".json file of the same name beside the .safetensors file"), "{error}");
    }
}

#[test]
fn names_tensors_that_are_missing_or_not_read() {
    let fault = |change: fn(&mut File) -> &mut File| {
        let mut file = published();
        change(&mut file);
        error(&file)
    };
    let end = "; it does not fit its model_type and init_args";
    let lacks = "the file lacks backbone.blocks.1.mlp.3.bias, combined_projection.weight";
    let missing = fault(|file| file.remove("combined_projection.weight").remove("backbone.blocks.1.mlp.3.bias"));
    assert_eq!(missing, format!("{lacks}{end}"));
    let unread = fault(|file| file.norm("layer_norm_token", 6));
    let names = "layer_norm_token.bias, layer_norm_token.weight";
    assert_eq!(unread, format!("the file has {names}, which the network does not read{end}"));
    let both = fault(|file| file.remove("combined_projection.bias").tensor("x", &[]));
    assert_eq!(
        both,
        format!("the file lacks combined_projection.bias and has x, which the network does not read{end}")
    );
    let lost = fault(|file| file.remove("logits_projection.weight"));
    assert_eq!(lost, "the weights have no tensor `logits_projection.weight`");
    let lost = fault(|file| file.remove("backbone.output_layer.1.weight"));
    assert_eq!(lost, "the weights have no tensor `backbone.output_layer.1.weight`");
}

#[test]
fn checks_blocks_and_sizes_against_the_metadata() {
    let fault = |key: &str, value: serde_json::Value| {
        let mut file = published();
        file.meta["init_args"][key] = value;
        error(&file)
    };
    let blocks = "one block each, but the file has 2 blocks (backbone.blocks.*)";
    assert_eq!(fault("hidden_dims", json!([16])), format!("init_args.hidden_dims is [16], {blocks}"));
    assert_eq!(fault("hidden_dims", json!([])), format!("init_args.hidden_dims is [], {blocks}"));
    assert_eq!(
        fault("hidden_dims", json!([16, 17])),
        "init_args.hidden_dims[1] is 17, but backbone.blocks.1.layer_norm.weight has shape [16]"
    );
    assert_eq!(
        fault("logits_size", json!(100)),
        "init_args.logits_size is 100, but logits_projection.weight reads 10 values; the file is damaged"
    );

    let mut file = published();
    file.linear("backbone.output_layer.1", 2, 16);
    assert!(error(&file).starts_with("backbone.output_layer.1.weight has 2 outputs; supported are 1"));
    file.tensor("backbone.output_layer.1.weight", &[16]);
    assert_eq!(error(&file), "backbone.output_layer.1.weight has shape [16]; it must be a matrix");
}
