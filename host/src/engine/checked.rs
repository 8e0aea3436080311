//! Router networks that are checked before any model is loaded.

use std::path::PathBuf;

use tokenrouter_plugin_api::net::Net;

use super::RouteSetup;
use crate::policy::nets;
use crate::request::ModelId;
use crate::runner::net::NetDigest;
use crate::runner::{ModelInfo, cuda};

/// Nets that [`super::check_route`] has found good, all for the same models. Their weights are not read again
/// for other routes that describe the same net, such as one route with several thresholds.
#[derive(Debug, Default)]
pub struct CheckedNets(Vec<Checked>);

#[derive(Debug)]
struct Checked {
    model: ModelId,
    directory: PathBuf,
    net: Net,
    bytes: u64,
    looks_back: bool,
    width: usize,
    /// What keeps a CUDA device from computing it.
    on_cuda: Result<(), String>,
    digest: NetDigest,
}

impl CheckedNets {
    /// Check `net`, which the policy of `route` describes for `model`. Tells what it stands for.
    pub(super) fn check(
        &mut self,
        route: &RouteSetup,
        net: &Net,
        model: ModelId,
        info: &ModelInfo,
    ) -> Result<NetDigest, String> {
        let same = |c: &&Checked| c.model == model && c.directory == route.directory && c.net == *net;
        if let Some(known) = self.0.iter().find(same) {
            return Ok(known.digest);
        }
        let ready = nets::load(route.policy.name(), net, &route.directory, info)?;
        let digest = ready.digest();
        self.0.push(Checked {
            model,
            directory: route.directory.clone(),
            net: net.clone(),
            bytes: ready.bytes(),
            looks_back: ready.back() > 0,
            width: ready.width(),
            on_cuda: cuda::check_net(&ready),
            digest,
        });
        Ok(digest)
    }

    /// Bytes of the weights of the nets at `model`.
    pub fn weight_bytes(&self, model: ModelId) -> u64 {
        self.0.iter().filter(|c| c.model == model).map(|c| c.bytes).sum()
    }

    /// Numbers of the score of a net that was found good.
    pub fn width(&self, net: &Net) -> Option<usize> {
        self.0.iter().find(|c| c.net == *net).map(|c| c.width)
    }

    /// Whether a net at `model` reads earlier positions, for which the model then keeps hidden states.
    pub fn looks_back(&self, model: ModelId) -> bool {
        self.0.iter().any(|c| c.model == model && c.looks_back)
    }

    /// Refuse nets at `model` that a CUDA device cannot compute.
    pub fn check_cuda(&self, model: ModelId) -> Result<(), String> {
        let mut columns = 0;
        for checked in self.0.iter().filter(|c| c.model == model) {
            checked.on_cuda.clone()?;
            columns += checked.width;
            cuda::check_scores(&checked.net.name, columns)?;
        }
        Ok(())
    }

    /// Files with the weights of the nets, each once.
    pub fn weights(&self) -> Vec<PathBuf> {
        let mut files: Vec<_> = self.0.iter().map(|c| c.directory.join(&c.net.weights)).collect();
        files.sort();
        files.dedup();
        files
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use safetensors::Dtype;
    use safetensors::tensor::TensorView;
    use tokenrouter_plugin_api::{Context, Decision, Policy, PolicyError, Requirements, RouteBatch};

    use super::*;
    use crate::engine::{Makers, OnError, TokenText, check_route};
    use crate::policy::Linked;
    use crate::policy::monitor::DEFAULT_BUDGET;
    use crate::policy::overrides::Overrides;
    use crate::request::TokenId;
    use crate::runner::Runner;
    use crate::runner::simulated::SimulatedRunner;

    /// Has one net, with the weights that its settings name.
    struct Scored(String);

    impl Policy for Scored {
        const NAME: &'static str = "scored";
        fn create(_: &Context<'_>, settings: &str) -> Result<Self, PolicyError> {
            Ok(Self(settings.into()))
        }
        fn requirements(&self) -> Requirements {
            let mut net = Net::new("score", self.0.clone());
            let hidden = net.hidden();
            net.linear(hidden, "gate");
            let mut wanted = Requirements::default();
            wanted.nets.push(net);
            wanted
        }
        fn route(&mut self, _: &RouteBatch<'_>, _: &mut [Decision]) {}
    }

    struct NoText;
    impl TokenText for NoText {
        fn token_bytes(&self, _: TokenId) -> Option<Vec<u8>> {
            None
        }
        fn token_id(&self, _: &str) -> Option<TokenId> {
            None
        }
    }

    fn route(directory: &Path, weights: &str) -> RouteSetup {
        RouteSetup {
            name: "r".into(),
            models: vec![(ModelId(0), "a".into()), (ModelId(1), "b".into())],
            entry: 0,
            policy: Arc::new(Linked::<Scored>::default()),
            settings: weights.into(),
            overrides: Overrides::default(),
            on_error: OnError::FailRequest,
            budget: DEFAULT_BUDGET,
            excluded: Vec::new(),
            directory: directory.into(),
        }
    }

    #[test]
    fn weights_are_read_once() {
        let infos = [0, 1].map(|m| SimulatedRunner::new(&format!("m{m}"), m, 50, 64).info().clone());
        let texts = [0, 1].map(|_| Arc::new(NoText) as Arc<dyn TokenText>);
        let check =
            |route: &RouteSetup, checked: &mut _| check_route(route, &texts, &infos, checked, &Makers::default());
        let dir = tempfile::tempdir().unwrap();
        let width = infos[0].hidden_size as usize;
        let (weight, bias) = (vec![0; 4 * width], [0; 4]);
        for name in ["w.safetensors", "v.safetensors"] {
            let tensors = [
                ("gate.weight", TensorView::new(Dtype::F32, vec![1, width], &weight).unwrap()),
                ("gate.bias", TensorView::new(Dtype::F32, vec![1], &bias).unwrap()),
            ];
            safetensors::serialize_to_file(tensors, None, &dir.path().join(name)).unwrap();
        }
        let mut checked = CheckedNets::default();
        let [w, v] = ["w.safetensors", "v.safetensors"].map(|name| route(dir.path(), name));
        let digests = check(&w, &mut checked).unwrap();
        check(&v, &mut checked).unwrap();
        assert_eq!(checked.weights(), ["v.safetensors", "w.safetensors"].map(|name| dir.path().join(name)));
        std::fs::remove_file(dir.path().join("w.safetensors")).unwrap();
        let again = RouteSetup { name: "r[threshold=1]".into(), ..route(dir.path(), "w.safetensors") };
        assert_eq!(check(&again, &mut checked), Ok(digests));
        let error = check(&again, &mut CheckedNets::default()).unwrap_err().to_string();
        assert!(error.contains("w.safetensors`: does not exist"), "{error}");
        // What was refused is not remembered as good, and other places are other files.
        assert!(check(&route(Path::new("elsewhere"), "v.safetensors"), &mut checked).is_err());
        assert_eq!(checked.weights().len(), 2);
    }
}
