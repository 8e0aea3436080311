use super::*;
use crate::runner::model_config::shapes;

fn qwen() -> ModelConfig {
    shapes::find("qwen3-0.6b").unwrap().config(None).unwrap()
}

#[test]
fn what_bf16_cannot_compute_is_refused_with_a_remedy() {
    assert_eq!(check_config(&qwen(), Dtype::Bf16), Ok(()));
    let odd = ModelConfig { head_dim: 80, ..qwen() };
    assert_eq!(
        check_config(&odd, Dtype::Bf16).unwrap_err(),
        "head_dim is 80; in bf16 it must be one of [32, 64, 96, 128]; set the model's dtype to \"f32\" or its device to \"cpu\""
    );
    assert_eq!(check_config(&odd, Dtype::F32), Ok(()));
    let narrow = ModelConfig { hidden: 1000, ..qwen() };
    assert!(check_config(&narrow, Dtype::Bf16).unwrap_err().contains("hidden_size is 1000"));
    let wide = ModelConfig { heads: 144, ..qwen() };
    assert_eq!(check_config(&wide, Dtype::Bf16), Ok(()), "18 query heads a key/value head");
    let large = ModelConfig { vocab_size: 400_000, ..qwen() };
    assert!(check_config(&large, Dtype::F32).unwrap_err().contains("vocab_size is 400000"));
}

#[test]
fn devices_that_the_kernels_do_not_run_on_are_refused() {
    let check = limits::check_device;
    assert_eq!(check("NVIDIA H200", (9, 0), 227 * 1024), Ok(()));
    assert_eq!(check("NVIDIA A100", (8, 0), 163 * 1024), Ok(()));
    assert_eq!(
        check("NVIDIA L4", (8, 9), 99 * 1024).unwrap_err(),
        "NVIDIA L4 has 99 KiB of shared memory a block, 161 KiB are needed; use an A100, H100 or H200, or set the model's device to \"cpu\""
    );
    assert!(check("Tesla T4", (7, 5), 64 * 1024).unwrap_err().contains("7.5, at least 8.0"));
}

#[test]
fn nets_that_the_kernels_do_not_compute_are_refused() {
    use crate::runner::net::{Node, Op};
    let reading = |count, back| {
        let node = Node { op: Op::TopLogits { count, back }, inputs: Vec::new(), width: count as usize };
        Net { name: "router".into(), nodes: vec![node] }
    };
    assert_eq!(check_net(&reading(128, 0)), Ok(()));
    assert!(check_net(&reading(129, 0)).unwrap_err().contains("the 129 largest logits"));
    let error = check_net(&reading(4, 2)).unwrap_err();
    assert!(
        error.starts_with("router: reads the logits of 2 positions before") && error.contains("\"cpu\""),
        "{error}"
    );
    assert_eq!(check_scores("router", 16), Ok(()));
    assert!(check_scores("router", 17).unwrap_err().contains("give 17 scores, but CUDA has room for 16"));
}

#[test]
fn sizes_are_what_is_allocated() {
    let config = qwen();
    // Matrices in bf16, norms and rotary frequencies in f32.
    let bf16 = weight_bytes(&config, Dtype::Bf16);
    let expected = 2 * config.parameters();
    assert!(bf16 > expected && bf16 < expected + expected / 1000, "{bf16} for {expected}");
    assert_eq!(page_bytes(&config, Dtype::Bf16), 16 * 114_688);
    assert_eq!(page_bytes(&config, Dtype::F32), 32 * 114_688);
    let (small, large) = (workspace_bytes(&config, Dtype::Bf16, 64), workspace_bytes(&config, Dtype::Bf16, 2048));
    assert!(large > small && small > 512 << 20);
}
