{{/* Permissions of the operator in a namespace that it serves. */}}
{{- define "ragcache.rules" -}}
- apiGroups: [ragcache.dev]
  resources: [ragcaches, ragcollections]
  verbs: [get, list, watch, patch]
- apiGroups: [ragcache.dev]
  resources: [ragcaches/status, ragcollections/status]
  verbs: [patch]
# Owner references with blockOwnerDeletion need this permission.
- apiGroups: [ragcache.dev]
  resources: [ragcaches/finalizers, ragcollections/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [services, configmaps, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
# The keys of a RagCache: the operator creates them once, and neither reads nor changes them.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies, ingresses]
  verbs: [get, list, watch, create, patch, delete]
# Replicas of a retriever choose their writer by a Lease. The operator can grant them only what it
# may do itself.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create, get, update]
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, watch, create, patch, delete]
# StatefulSets create claims. The operator only deletes them, with dataPolicy Delete.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, delete]
# For the cause of a failed start, and for the progress of a sync.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end -}}

{{/* Permissions for cluster-scoped kinds, which the operator always needs. */}}
{{- define "ragcache.clusterRules" -}}
{{- if .Values.webhook.enabled }}
- apiGroups: [admissionregistration.k8s.io]
  resources: [validatingwebhookconfigurations, mutatingwebhookconfigurations]
  resourceNames: [{{ include "ragcache.webhookConfiguration" . }}]
  verbs: [get, update]
{{- end }}
{{- end -}}
