//! The plugin's side: functions of the root module over an author's type.

use abi_stable::{
    library::{CheckTypeLayout, LibHeader, RootModuleResult},
    marker_type::ErasedPrefix,
    prefix_type::{PrefixRefTrait, WithMetadata},
    staticref,
    std_types::{RResult, RSliceMut, RStr, RString},
};

use super::guard::{guard, install_hook};
use super::raw::{
    RawAcceptance, RawBatch, RawContext, RawEntry, RawHandoff, RawPeer, RawRequest, RawRequirements, RawServices,
};
use super::{Description, Root, RootRef};
use crate::net::WeightsInfo;
use crate::{Context, Decision, LogLevel, ModelDescription, Policy, Services, TokenId};

/// The header that a plugin exports.
pub const fn header<P: Policy>() -> LibHeader {
    // SAFETY: `construct` returns an erased `RootRef`.
    unsafe { LibHeader::from_constructor::<RootRef>(construct::<P>, CheckTypeLayout::Yes) }
}

extern "C" fn construct<P: Policy>() -> RootModuleResult {
    install_hook();
    let root = RootRef(Glue::<P>::ROOT.as_prefix());
    // SAFETY: erasing the fields of a prefix type is what `LibHeader` asks for.
    RResult::ROk(unsafe { root.to_prefix_ref().cast::<ErasedPrefix>() })
}

struct Glue<P>(P);

impl<P: Policy> Glue<P> {
    staticref!(const ROOT: WithMetadata<Root> = WithMetadata::new(Root {
        describe: describe::<P>,
        create: create::<P>,
        requirements: requirements::<P>,
        entry: entry::<P>,
        route: route::<P>,
        send: send::<P>,
        receive: receive::<P>,
        finished: finished::<P>,
        destroy: destroy::<P>,
        get_extension,
        #[cfg(feature = "next-minor")]
        next,
    }));
}

extern "C" fn describe<P: Policy>() -> Description {
    Description { name: RStr::from_str(P::NAME), settings_schema: RStr::from_str(P::SETTINGS_SCHEMA) }
}

/// This version has no extension.
extern "C" fn get_extension(_id: RStr<'_>) -> *const () {
    std::ptr::null()
}

#[cfg(feature = "next-minor")]
extern "C" fn next() -> u32 {
    super::ABI_VERSION.minor
}

unsafe extern "C" fn create<P: Policy>(raw: &RawContext<'_>, settings: RStr<'_>) -> RResult<*mut (), RString> {
    guard(|| {
        let describe = |m: &super::raw::RawModel<'_>| ModelDescription { name: m.name.into(), role: m.role.into() };
        let models: Vec<_> = raw.models.iter().map(describe).collect();
        let context = Context {
            route: raw.route.as_str(),
            model: raw.model,
            models: &models,
            entry: raw.entry,
            vocab_size: raw.vocab_size,
            eos: raw.eos.as_slice(),
            services: &raw.services,
        };
        let policy = P::create(&context, settings.as_str()).map_err(|e| e.message)?;
        Ok(Box::into_raw(Box::new(policy)).cast::<()>())
    })
}

/// # Safety
/// `state` is an instance as [`Root`] wants it.
unsafe fn instance<'a, P>(state: *mut ()) -> &'a mut P {
    // SAFETY: `create` made `state` from a `Box<P>`, and the caller promises that it lives and that
    // calls do not overlap.
    unsafe { &mut *state.cast::<P>() }
}

// SAFETY of `instance` in each function below: handed on from the caller, see `Root`.

unsafe extern "C" fn requirements<P: Policy>(state: *mut ()) -> RResult<RawRequirements, RString> {
    guard(|| Ok(unsafe { instance::<P>(state) }.requirements()))
}

unsafe extern "C" fn entry<P: Policy>(state: *mut (), request: &RawRequest<'_>) -> RResult<RawEntry, RString> {
    guard(|| Ok(unsafe { instance::<P>(state) }.entry(&request.view())))
}

unsafe extern "C" fn route<P: Policy>(
    state: *mut (),
    batch: &RawBatch<'_>,
    mut out: RSliceMut<'_, Decision>,
) -> RResult<(), RString> {
    guard(|| {
        unsafe { instance::<P>(state) }.route(&batch.view(), out.as_mut_slice());
        Ok(())
    })
}

unsafe extern "C" fn send<P: Policy>(
    state: *mut (),
    request: &RawRequest<'_>,
    to: u32,
) -> RResult<RawHandoff, RString> {
    guard(|| Ok(unsafe { instance::<P>(state) }.send(&request.view(), to)))
}

unsafe extern "C" fn receive<P: Policy>(
    state: *mut (),
    request: &RawRequest<'_>,
    message: &RawPeer<'_>,
) -> RResult<RawAcceptance, RString> {
    guard(|| Ok(unsafe { instance::<P>(state) }.receive(&request.view(), &message.view())))
}

unsafe extern "C" fn finished<P: Policy>(state: *mut (), slot: u32) -> RResult<(), RString> {
    guard(|| {
        unsafe { instance::<P>(state) }.finished(slot);
        Ok(())
    })
}

unsafe extern "C" fn destroy<P: Policy>(state: *mut ()) -> RResult<(), RString> {
    guard(|| {
        // SAFETY: `create` made `state` from a `Box<P>`, and the caller gives it up.
        drop(unsafe { Box::from_raw(state.cast::<P>()) });
        Ok(())
    })
}

// SAFETY of the calls: the host keeps `data` valid while `create` runs, and a policy sees the services
// only there.
impl Services for RawServices {
    fn token_bytes(&self, id: TokenId) -> Option<Vec<u8>> {
        unsafe { (self.token_bytes)(self.data, id) }.into_option().map(|bytes| bytes.to_vec())
    }

    fn token_id(&self, text: &str) -> Option<TokenId> {
        unsafe { (self.token_id)(self.data, text.into()) }.into_option()
    }

    fn weights(&self, path: &str) -> Result<WeightsInfo, String> {
        unsafe { (self.weights)(self.data, path.into()) }.into_result().map(Into::into).map_err(String::from)
    }

    fn log(&self, level: LogLevel, message: &str) {
        unsafe { (self.log)(self.data, level as u32, message.into()) }
    }
}
