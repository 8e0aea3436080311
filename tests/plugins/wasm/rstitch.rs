//! R-Stitch as a module decides as R-Stitch as a library does.

use proptest::prelude::*;
use rstitch::RStitch;
use tokenrouter::policy::{Linked, PolicyFactory};
use tokenrouter_plugin_api::{RequestView, Requirements, SignalSet};

use super::support::{at, decide, load, wat};

fn module() -> Vec<u8> {
    wat(include_str!("../../../plugins/rstitch/rstitch.wat"))
}

#[test]
fn it_says_the_same_of_itself() {
    let (module, library) = (load(&module()).unwrap(), Linked::<RStitch>::default());
    assert_eq!(module.name(), library.name());
    let read =
        |factory: &dyn PolicyFactory| -> serde_json::Value { serde_json::from_str(factory.settings_schema()).unwrap() };
    assert_eq!(read(&module)["properties"], read(&library)["properties"]);
    let policy = at(&module, 0, &["slm", "llm"], 0, "{}").unwrap();
    assert_eq!(*policy.requirements(), Requirements::signals(SignalSet::ENTROPY_NORM));
}

/// Values around the threshold, and any bits.
fn signals() -> impl Strategy<Value = Vec<f32>> {
    let value = prop_oneof![(0.0f32..1.0), any::<u32>().prop_map(f32::from_bits), Just(0.25f32), Just(0.03f32)];
    proptest::collection::vec(value, 1..600)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]
    #[test]
    fn it_decides_the_same(
        signals in signals(),
        threshold in prop_oneof![Just(0.25), Just(0.03), 0.0..=1.0f64],
        large_first in any::<bool>(),
        model in 0u32..2,
    ) {
        let (roles, entry) = if large_first { (["llm", "slm"], 1) } else { (["slm", "llm"], 0) };
        let settings = serde_json::json!({ "threshold": threshold }).to_string();
        let (module, library) = (load(&module()).unwrap(), Linked::<RStitch>::default());
        let mut module = at(&module, model, &roles, entry, &settings).unwrap();
        let mut library = at(&library, model, &roles, entry, &settings).unwrap();
        let positions = vec![3; signals.len()];
        let decided = decide(&mut *module, &positions, &signals).unwrap();
        prop_assert_eq!(&decided, &decide(&mut *library, &positions, &signals).unwrap());
        for (slot, kind) in decided.iter().enumerate() {
            if let tokenrouter_plugin_api::DecisionKind::To(to) = *kind {
                let request = RequestView::new(1, slot as u32, 0, 1, 9, &[5]);
                prop_assert_eq!(module.send(&request, to).unwrap(), library.send(&request, to).unwrap());
            }
        }
    }
}
